"""Publishing of the policy's weights by the ranks of a replica."""
