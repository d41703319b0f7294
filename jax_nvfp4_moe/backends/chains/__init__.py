"""Chains: several FFI calls of one platform that run as a single call.

**Why.** XLA records each custom call of a CUDA graph as a graph of its own, whose kernels start
when all kernels of the calls before it have ended. Inside of one call, the next kernel is already
on the device by then, and may have requested its weights. This saves one to two microseconds for
each kernel of a decoding step.

**Who decides what.** Each fact has one place:

| fact | place |
|---|---|
| which calls of a program form a chain | `ops.chain.chain_calls`, which reads the jaxpr |
| what a call is | `calls` |
| which calls are fused into the next call | the table in `fusion` |
| which calls run in parallel with the calls ahead of them | `forks` |
| where values lie that only the chain reads | `emission`, which shares memory between them |
| how a chain is written into one FFI call | `emission`, for ``ffi/call_chain.h`` to read |
| which stream a call runs on | ``ffi/call_chain.h`` and the bindings of CUDA |

**The words.** A call is *fused into the next call* if it launches nothing, or not everything, and
the kernel of the next call does the rest. The handler of the first call leaves the work in
``RunningChain::work``, and the handler of the next call takes it. If it does not, the chain fails:
a rule in `fusion` and the two handlers must agree.

A *fork* is a row of successive calls that run on a second stream. Its *scope* is the row of calls
directly ahead of it, which run in parallel with it. The call after a fork is its *join*::

    norm | router  route  experts | gate_up  activate  down | sum
           ----- scope ---------    ------- fork --------     join

Calls of the scope and of the fork share no memory that one of them writes. A call that is fused is
never the last call of a scope or of a fork. Only GPUs run forks; on a CPU, all calls run in order.

**What is written.** For call i, the FFI call has three attributes, named by its number:

* ``call_<i>_target``: the FFI target.
* ``call_<i>_attributes``: the attributes of the call.
* ``call_<i>_buffers``: the number of operands, the number of results, and the flags. Then follow,
  for each operand and result, its place, its index or offset, its element type, the number of
  dimensions, and the dimensions.

The flags are 1 for the first call of a scope, 2 for a call of a fork, 4 for a join, and 8 for a
call that is fused. The last result of the FFI call is the memory for values that only the chain
reads.

**How to fuse another pair.** Add a rule to the table in `fusion`, let the handler of the first call
leave its work and that of the second take it, and add the pair to the tests of `fusion`.
"""
