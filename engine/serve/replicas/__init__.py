"""Several engines behind one address: which of them computes a request, and what becomes of it when one fails."""
