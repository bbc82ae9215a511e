"""Execution of a step: attach, session, executor, lanes, buffers, offload.

One batch, from the call of the model to the commit. schedule/phases.py determines the order of the
actions and their waits. ActionScheduler (scheduler.py) enqueues them, Lanes (lanes.py) execute them
in this order, and ActionRunner (actions.py) implements them. In brackets: the thread, and the
letter of the action (schedule/actions.py). `caller` runs the model; in backward on an accelerator
it is autograd's own thread. `ssd` submits I/O, `done` completes it, and `optimizer` runs updates
(the caller does if one rank computes on the CPU). `h2d` and `d2h` copy to and from a device with
its own memory, and `compute` waits for the events of that device. `net` communicates with other
ranks. With `overlap=False`, the caller does everything, in order.

Forward 1 [caller] model(**batch): Executor.enter_forward waits until resident parameters are
updated. With labels, a causal language model's forward is SlicedHead's (head.py), which calls the
decoder. 2 [caller] A block is called: WrappedSite, _BlockFunction, BlockRunner.forward,
ActionScheduler.begin_forward. If the order is known, the whole forward was enqueued at the end of
the previous step or, after a flush, is enqueued now. Otherwise this block is enqueued. 3 [ssd R]
Unless a host slot already holds its weights, the newest ones are read into a host slot, committed
or not. [h2d L] They are copied to a device slot. [net A] All ranks gather the shards. 4 [caller F]
Placeholders (OffloadedParameter) are swapped for views of the slot; the block runs, slice by slice
(SlicedCompute in capture/recompute.py), without autograd's saved tensors. Its inputs, its random
state and the results in the save plan (capture/selective_checkpoint.py) are kept as planned: on the
device, in host memory [d2h K] or on SSD [ssd O]. 5 [caller] The head runs slice by slice, in
training forward and backward at once. The gradients of its weights and of the hidden state wait in
_HeadFunction. Full logits exist only if the caller reads `.logits`.

Backward 6 [caller] loss.backward(): the backward of every block calls Executor.enter_backward. The
first call registers on_backward_done as autograd's callback and, if the order is known, enqueues
the whole backward. 7 [ssd R, I; h2d L, V; net A] Evicted weights and activations are loaded again.
8 [caller B] BlockRunner.backward: SlicedCompute recomputes what was not saved and runs autograd.

A gradient GradientSink Hooks add it up on the compute device until the last use of its weights, in
fp32 if several gradients are summed. With one rank and a device with its own memory, gradients of
shared weights are set aside in host memory until the next use (GradientOffload.set_aside).
pending.on_device After the last use (GradientCollector.finish), on a device: [net X] reduce-scatter
over the ranks, then [d2h D] the copy by GradientOffload. pending.on_host Updates read it here. On
the CPU, it comes directly from the sink. GradientSpill A held gradient that has no room in host
memory: [ssd P] is its write, [ssd G] the read for its update. Gradients of resident parameters are
in `.grad` until on_backward_done. [optimizer H] sums the squares of gradients for the norm; if a
device has summed them already, H uses that sum. The caller sums the squares of resident parameters
and of groups that backward did not reach.

The optimizer 9 [ssd S] A chunk of state is read into the state ring: moments; master weights (fp16)
or the bits removed by rounding (bf16); and the moving average, if there is one. 10 [optimizer U]
update_chunk changes the state in place and the weights in the host slot. The gradient is then
freed, or held until the step is accepted. schedule/placement.py has the table of when updates run.
11 [ssd W] State and weights are written to the generation that is not committed.

The end of the step 12 [caller] Executor.on_backward_done: hand over late and resident gradients,
and compute the norm if it is needed (clipping, fp16, `serial`). If the norm is too large for
updates that have already run, Clipping rolls them back, and they are redone or the step runs again
(Decision in step.py). TrainState counts the step. Its metadata (counters, random state, buffers,
the row of metrics) waits for the commit, and the next forward is enqueued. An fp16 overflow skips
all updates; its metadata is committed alone, or with earlier steps that are not committed yet. 13
[done C] After the last W, Store.commit syncs the disk slot that was written and its checksums, and
renames the manifest (with several ranks: all prepare, wait at a barrier, and rename). The step is
then durable. Its generation is only read until the next commit, while the older one is overwritten.
With commits by interval, C of most steps commits nothing, and weights and state in host memory are
written only in steps that commit. If all updates run in the next forward, cached chunks are written
during the backward after it, and C follows there. A crash can then lose the step in flight and the
one before it.

An error on a lane is raised by every wait. Executor.abort_step drops queued actions, completes
those in flight, and reads cached weights and state of the last commit again. If the error comes
from the model's own code and no lane has failed, the earlier steps are committed first, if
possible.
"""
