"""What an expert would write by hand with stock torch, one small file for each way to do it."""

SCHEDULES = ("gpipe", "1f1b", "interleaved_zero_bubble", "zbv")  # of torch.distributed.pipelining
SIDES = {
    "gpipe": "torch pipelining, GPipe",
    "1f1b": "torch pipelining, 1F1B",
    "interleaved_zero_bubble": "torch pipelining, interleaved zero bubble",
    "zbv": "torch pipelining, ZB-V",
    "ddp": "torch DDP",
    "one_process": "torch, one process",
    "compile": "torch.compile, one process",
}
ALONE = ("one_process", "compile")  # one process with the threads of all ranks
