"""What a layer is made of: a mixer and a feed-forward, with their tensors, split over ranks, state."""
