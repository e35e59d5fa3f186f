"""Fields of requests and answers, their ranges and errors, and the OpenAPI document."""
