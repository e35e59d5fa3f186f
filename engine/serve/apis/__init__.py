"""The APIs that the server speaks: each decodes its requests and encodes its answers."""
