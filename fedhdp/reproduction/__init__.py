"""The paper's tables and figures, made through the public API of the package."""
