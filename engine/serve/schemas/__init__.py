"""Bodies of requests and how they are read, errors, and the OpenAPI document."""
