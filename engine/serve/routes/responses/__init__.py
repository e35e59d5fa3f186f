"""/v1/responses: a conversation of items in, items out, whole or as events, and the stored ones."""
