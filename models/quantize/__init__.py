"""A GGUF file with its tensors in other types: which tensor gets which, imatrix files, and the file itself."""
