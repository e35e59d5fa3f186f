"""What all APIs share: how routes are called, from canonical requests to the engine's, and from events to answers."""
