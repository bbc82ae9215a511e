"""What runs a step: attach, session, executor, lanes, buffers, offload.

One batch, from the call of the model to the commit. schedule/phases.py says in which order and
after what, ActionScheduler (scheduler.py) enqueues it, Lanes (lanes.py) hold to it, ActionRunner
(actions.py) is what the lanes do. In brackets: the thread, and the letter of the action
(schedule/actions.py). `caller` runs the model; in backward on an accelerator it is autograd's own
thread. `ssd` submits I/O, `done` completes it, `optimizer` runs updates (the caller does where one
rank computes on the CPU), `h2d` and `d2h` copy to and from a device with memory of its own, where
`compute` waits for its events; `net` exchanges with other ranks. `overlap=False` does all of it on
the caller, in order.

Forward
 1 [caller] model(**batch): Executor.enter_forward waits until resident parameters are updated. With
   labels, a causal language model's forward is SlicedHead's (head.py), which calls the decoder.
 2 [caller] A block is called: WrappedSite, _BlockFunction, BlockRunner.forward,
   ActionScheduler.begin_forward. If the order is known, all of forward has been enqueued by the
   end of the step before, or is now after a flush; else this block is.
 3 [ssd R] Unless they are cached in host memory or still there, its weights are read into a host
   slot, the newest ones, committed or not. [h2d L] To a device slot. [net A] All-gather of
   the ranks' shards.
 4 [caller F] Placeholders (OffloadedParameter) are swapped for views of the slot; the block runs,
   slice by slice (SlicedCompute in capture/recompute.py), without autograd's saved tensors. Its
   inputs, random state and what the save plan says (capture/selective_checkpoint.py) stay: on the
   device, in host memory [d2h K] or on SSD [ssd O], as planned.
 5 [caller] The head runs slice by slice, forward and, in training, backward at once: gradients of
   its weights and of the hidden state wait in _HeadFunction. Full logits exist only if the caller
   reads `.logits`.

Backward
 6 [caller] loss.backward(): every block's calls Executor.enter_backward, of which the first queues
   on_backward_done as autograd's callback and enqueues all of backward if its order is known.
 7 [ssd R, I; h2d L, V; net A] Weights that were evicted, and activations, come back.
 8 [caller B] BlockRunner.backward: SlicedCompute recomputes what was not saved and runs autograd.

A gradient
   GradientSink        hooks add it up on the compute device until the last use of its weights (in
                       fp32 where several are summed); with one rank, those of shared weights are
                       set aside in host memory meanwhile if the device has its own
                       (GradientOffload.set_aside)
   pending.on_device   that was the last use (GradientCollector.finish): in flight off a device,
                       [net X] reduce-scatter over the ranks, [d2h D] by GradientOffload
   pending.on_host
                       where updates find it; on the CPU right after the sink
   GradientSpill       a held gradient without room: [ssd P] written, [ssd G] read for its update
   Resident parameters have theirs in `.grad` until on_backward_done. [optimizer H] takes the
   squares of gradients for a norm; a device has summed them before it handed them over, and H reads
   that. Squares of resident parameters, and of groups that backward did not reach, the caller sums.

The optimizer
 9 [ssd S] A chunk of state into the state ring: moments; also master weights (fp16) or the bits
   that bf16 rounds off (bf16); also the moving average, if there is one.
10 [optimizer U] update_chunk: state in place, new weights into the host slot; the gradient is
   freed, or held until the step is accepted.
   When updates run is one table: schedule/placement.py.
11 [ssd W] State and weights go to the generation that is not committed.

The end of the step
12 [caller] Executor.on_backward_done: late and resident gradients; the norm, where it is needed
   (clipping, fp16, `serial`), and if it is too large for updates that have run, their roll-back
   (Clipping), after which they are redone or the step runs again (Decision in step.py); TrainState
   counts the step; its meta
   (counters, random state, buffers, the row of metrics) waits for the commit; the next forward is
   enqueued. An fp16 overflow skips all updates; its meta is committed alone, or with the steps
   before it if they are not yet.
13 [done C] Behind the last W: Store.commit syncs the disk slot that was written, its checksums,
   renames the manifest (ranks: all prepare, meet, rename). Now the step is durable, and its
   generation is only read until the next commit, while the older one is written over. With
   commits by interval, C of most steps commits nothing, and weights and state in host memory are
   written only in the steps that commit. Where all updates run in the next forward, what is cached
   is written during the backward after it, and C comes there: a crash can cost the step in flight
   and the one before it.

An error on a lane is raised by every wait. Executor.abort_step drops what is queued, completes what
is in flight, and reads cached weights and state of the last commit again. If no lane has failed,
but the model's own code, it first commits the steps before, where it can.
"""
