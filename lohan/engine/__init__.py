"""The execution of training steps: attach, session, executor, lanes, buffers and offloading.

The numbered list follows one batch from the call of the model to the commit. Each item names the
module that implements it; a module named without a package is in this one. schedule/phases.py
determines the order of the actions, their waits follow from the table in schedule/ops.py,
scheduler.py enqueues them, lanes.py executes them in this order, and actions.py implements them.

The thread and the letter of the action are given in brackets. `caller` runs the model; in backward
on an accelerator it is autograd's own thread. `ssd` submits I/O, `done` completes it, and
`optimizer` runs updates (with one rank and compute on the CPU, `caller` runs them). `h2d` and `d2h`
copy to and from a device with its own memory, and `compute` waits for the events of that device.
`net` communicates with other ranks. With `overlap=False`, the caller does everything, in order.

Forward
 1. executor.py [caller]: `model(**batch)` calls `enter_forward`, which waits until resident
    parameters (resident.py) are updated. With labels, the forward of a causal language model is
    that of `SlicedHead` (head.py), which calls the decoder.
 2. wrapping.py [caller]: a block is called through `WrappedSite`, `_BlockFunction` and
    `BlockRunner.forward`. Its arguments become a `SavedCall` (capture/saved_call.py).
 3. scheduler.py [caller]: `begin_forward`. If the order is known, the whole forward was enqueued at
    the end of the previous step or, after a flush, is enqueued now. Otherwise this block is.
 4. actions.py, buffers.py [ssd R]: the newest weights, committed or not, are read into a host slot,
    unless a slot already holds them. [h2d L] They are copied to a device slot. [net A] All ranks
    gather the shards.
 5. capture/recompute.py [caller F]: placeholders are swapped for views of the slot, and the block
    runs slice by slice, without autograd's saved tensors. Its inputs, its random state and the
    results in the save plan (capture/selective_checkpoint.py) are kept on the device, in host
    memory [d2h K] or on SSD [ssd O] (offload.py).
 6. head.py [caller]: the head runs slice by slice, in training forward and backward at once. The
    gradients of its weights and of the hidden state wait in `_HeadFunction`. Full logits exist only
    if the caller reads `.logits`.

Backward
 7. executor.py [caller]: the backward of every block calls `enter_backward`. The first call
    registers `on_backward_done` as autograd's callback. schedule/placement.py decides whether
    updates wait for the norm, and when each group is updated. If the order is that of the previous
    step, the whole backward is enqueued.
 8. [ssd R, I; h2d L, V; net A]: evicted weights and activations are loaded again.
 9. wrapping.py, capture/recompute.py [caller B]: `BlockRunner.backward` recomputes what was not
    saved and runs autograd.
10. gradients.py [caller]: `GradientSink` adds up the gradients of a group until its last use. Then
    they go to `pending.on_host`, on a device by way of `pending.on_device` [net X, d2h D]
    (gradient_transport.py). A held gradient without room in host memory goes to SSD [ssd P, G].
    [optimizer H] The squares are summed for the norm.

Update
11. actions.py, buffers.py [ssd S]: a chunk of state is read into the state ring: moments; master
    weights (fp16) or the bits removed by rounding (bf16); the moving average, if there is one.
12. [optimizer U]: `update_chunk` changes the state in place and the weights in the host slot. The
    gradient is then freed, or held until the step is accepted.
13. store/store.py [ssd W]: state and weights are written to the generation that is not committed.

The end of the step
14. executor.py [caller]: `on_backward_done` hands over late and resident gradients. If the norm is
    needed, step.py computes it and makes the decision; updates that ran too early are rolled back.
    The metadata of the step (run_record.py: counters, random state, buffers, the row of metrics)
    waits for the commit, and the next forward is enqueued.
15. store/store.py [done C]: after the last W, `Store.commit` syncs the slot on disk that was
    written and its checksums, and renames the manifest (with several ranks: all prepare, wait at a
    barrier, and rename). The step is then durable. Its generation is only read until the next
    commit, while the older one is overwritten. With commits by interval, C of most steps commits
    nothing, and weights and state in host memory are written only in steps that commit. If all
    updates run in the next forward, cached chunks are written during the backward after it, and C
    follows there. A crash can then lose the step in flight and the one before it.

An error on a lane is raised by every wait. `Executor.abort_step` drops queued actions, completes
those in flight, and reads cached weights and state of the last commit again. If the error comes
from the model's own code and no lane has failed, the earlier steps are committed first, if
possible.
"""
