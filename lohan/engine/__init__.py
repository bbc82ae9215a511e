"""What runs a step: attach, session, executor, lanes, buffers, offload.

One batch, from the call of the model to the commit. Threads are those of lanes.py: `caller` is the
thread that runs the model (the gpu lane), `ssd` submits I/O and `done` completes it, `cpu` runs the
optimizer (the caller does where compute is on the CPU), `h2d` and `d2h` copy to and from a device
with memory of its own, `net` exchanges with other ranks. F, B, R, S, U, W, C are the actions of
schedule/actions.py; Pipeline decides when, ActionRunner (actions.py) is what they do.

Forward
 1 caller  model(**batch): Executor.enter_forward waits until resident parameters are updated.
 2 caller  A block's module is called: SiteRunner -> Calls.forward -> Pipeline.begin_forward.
           Known order (every step after the first): all of forward was enqueued at the end of the
           step before, so that reads run ahead. Otherwise this block is enqueued now.
 3 ssd     R: a weight slot in host memory is read from the committed generation (WeightSlots).
   h2d     L: the slot is copied to a device slot (DeviceSlots). `net` A: all-gather of its shards.
 4 caller  F: Lanes.begin waits for the slot, placeholders (OffloadedParameter) are swapped for
           views of it, the block runs, slice by slice, without autograd's saved tensors. Kept are
           its inputs and what the save plan says (capture.selective_checkpoint), in host memory,
           on SSD (O) or on their way off the device (K), as planned. Lanes.end.
 5 caller  The head runs in slices (head.py); the loss comes out.

Backward
 6 caller  loss.backward(): autograd comes to the last block's _BlockFunction.backward. The first
           one calls Executor.enter_backward: finish_step is queued as autograd's callback, and the
           whole backward is enqueued if its order is known.
 7 ssd     R again where the slot was evicted; I, V bring activations back.
 8 caller  B: Calls.backward recomputes what was not kept, slice by slice, and runs autograd.

A gradient is in five places, one after the other:
   sink       hooks on the block's weights add it up (Collector, GradientSink), on the compute
              device, fp32 where several are summed; shared weights wait here for their last use,
              or set aside in host memory (Landing.set_aside)
   handover   no call of this backward adds to the group any more: Collector.finish ->
              Handover.on_device, or Handover.grads where compute is on the CPU
   landing    d2h D: in host memory (Landing.land); before it `net` X: reduce-scatter
   spill      clipping or fp16 must see the norm first: H takes the squares, and what has no room
              in host memory is written to SSD (P) and read again (G)
   update     U consumes it and lets it go (ActionRunner.run)

The optimizer
 9 ssd     S: a chunk of master weights and moments is read into the state ring.
10 cpu     U: update_chunk, in place, and new compute weights into the slot. When: in backward as
           soon as the gradient is there (`optimized`; `balanced` keeps some for the next forward);
           after the norm is known where gradients are held (clipping, fp16).
11 ssd     W: state and weights go to the generation that is not committed (Store).

The end of the step
12 caller  finish_step: late and resident gradients, the norm, Progress counts the step, its meta
           (counters, random state, buffers) is appended for the commit; the next forward is
           enqueued.
13 ssd     C, behind the last W: Store.commit syncs the slots, writes and renames the manifest.
           Only now is the step durable; the other generation stays whole until the next commit.
           With updates in the next forward, C runs there: a crash costs at most that step too.

An error on any lane is kept and raised by every wait (lanes.py); Executor.abort drops what is
queued, completes what is in flight and reads pinned state back from the committed generation.
"""
