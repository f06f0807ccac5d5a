"""``torch.distributed.rpc._utils`` manages who is in a job of open size; telegrad's rendezvous does that itself."""
