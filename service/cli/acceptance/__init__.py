"""`npuserve check --accept`: a device beside the CPU and beside golden functions."""
