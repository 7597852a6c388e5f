"""The device side: everything that touches a tensor."""
