"""The chat page: its sources (`source/`, TypeScript), what `make page` bundles of them (`static/`), and its routes."""
