"""Making a quantized checkpoint of another one: `octavo quantize`."""
