"""torch's FlexAttention interface, served by tilewise."""
