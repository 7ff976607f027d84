"""Generated handwriting as an image: `python examples/sheet.py docs/figures/handwriting.png`."""

import sys

import numpy as np
from matplotlib import image

from fedhdp.datasets import handwriting_sheet

path = sys.argv[1] if len(sys.argv) > 1 else "handwriting.png"
digits, letters = (handwriting_sheet(writers=7, glyphs=glyphs) for glyphs in ("0123456789", "aAbBdDeEfFgGhHkK"))
margin = np.zeros((len(digits), 28), np.uint8)
image.imsave(path, 255 - np.concatenate([digits, margin, letters], axis=1), cmap="gray", vmin=0, vmax=255)
