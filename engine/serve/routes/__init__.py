"""The routes: from a request's body to requests of the engine, and from its events to an answer."""
