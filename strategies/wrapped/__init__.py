"""Tensors that keep their elements in others, as quantized ones do: taken apart, put together, cut. Imports common."""
