"""The largest rate of single-precision matrix products that numpy and JAX reach on this machine."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import work as w


def main() -> None:
    task = w.read_task()
    product = jax.jit(jnp.matmul)
    size = task.options.get("size", 2048)
    rates = {
        "numpy": w.gemm(np.matmul, size),
        "jax": w.gemm(lambda a, b: product(jnp.asarray(a), jnp.asarray(b)).block_until_ready(), size),
    }
    task.out.write_text(json.dumps({"gemm": rates}))


main()
