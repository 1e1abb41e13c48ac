"""The 4D runtime: executes a launch config with torch, over NCCL or Gloo."""
