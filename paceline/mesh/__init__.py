"""The elastic torch.distributed mesh: process groups formed and abandoned per epoch, on gloo or
NCCL."""
