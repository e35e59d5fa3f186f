"""Chat templates, and the limited process that renders them."""
