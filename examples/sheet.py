"""A sheet of the embedded handwriting as a picture: `python examples/sheet.py docs/figures/handwriting.png`."""

import sys

import numpy as np
from matplotlib import image

from fedhdp.datasets.handwriting import sheet

digits, letters = sheet(writers=7, glyphs="0123456789"), sheet(writers=7, glyphs="aAbBdDeEfFgGhHkK")
picture = 255 - np.concatenate([digits, np.zeros((len(digits), 28), np.uint8), letters], axis=1)
image.imsave(sys.argv[1] if len(sys.argv) > 1 else "handwriting.png", picture, cmap="gray", vmin=0, vmax=255)
