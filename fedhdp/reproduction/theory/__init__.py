"""The paper's theory as figures and tables."""
