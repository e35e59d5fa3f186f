"""Structs that APIs share: fields of bodies, canonical requests, errors; how bodies are read, and their JSON schemas.

Reading and its errors (`reading`) and the OpenAPI document (`openapi_requests`) follow from the types of bodies. What a
server's own limits, a vocabulary, a template or a grammar refuses is checked where it is used. So are parts that
msgspec has no type for (`component`); their schemas are in `openapi_requests`.
"""
