"""The elastic mesh: process groups formed and abandoned per epoch, on gloo or NCCL."""
