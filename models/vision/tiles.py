"""Arrangements of square tiles for an image, as InternVL chooses them and families after it.

Definition: `transformers` models/got_ocr2 (get_optimal_tiled_canvas) and models/lfm2_vl (find_closest_aspect_ratio).
"""

from PIL import Image

from quengine.models.vision.pixels import resized


def tile_counts(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows), `least` to `most` tiles in all, with the ratio of sides nearest to the image's.

    Of two equally near ones, the one with more tiles is taken if the image has over half as many pixels as these.
    """
    ratio, best, distance = width / height, (1, 1), float("inf")
    every = [(cols, rows) for cols in range(1, most + 1) for rows in range(1, most + 1)]
    for cols, rows in sorted((g for g in every if least <= g[0] * g[1] <= most), key=lambda g: g[0] * g[1]):
        found = abs(ratio - cols / rows)
        fills = width * height > 0.5 * tile * tile * cols * rows
        if found < distance or (found == distance and fills):
            best, distance = (cols, rows), found
    return best


def cut_tiles(image: Image.Image, cols: int, rows: int, tile: int, resample: int) -> list[Image.Image]:
    """The image resized to `cols` x `rows` tiles, and cut row by row."""
    whole = resized(image, rows * tile, cols * tile, resample)
    boxes = [(c * tile, r * tile, (c + 1) * tile, (r + 1) * tile) for r in range(rows) for c in range(cols)]
    return [whole.crop(box) for box in boxes]
