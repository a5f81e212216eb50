"""What a run keeps on disk to be resumed: its folder, checkpoints, states."""
