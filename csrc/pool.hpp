// A small persistent thread pool for the kernels. Several callers may use it at the same time. Each
// caller works on its own job too, so a call finishes even if no helper is free.
#pragma once

#include <stddef.h>

#include <functional>

namespace lohan {

int threads();
void set_threads(int count);  // throws std::invalid_argument

// Call body(0) .. body(blocks - 1) once each, on up to threads() threads. body must not throw.
void parallel_for(size_t blocks, const std::function<void(size_t)>& body);

}  // namespace lohan
