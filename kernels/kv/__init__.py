"""How a key/value cache is stored: types, blocks, rows."""
