"""One file a vendor: everything truestep knows of DDP, FSDP2, DeepSpeed and accelerate is here."""
