// Plain kernels: any processor, and the specification of the others.
#include "update_kernel.hpp"

namespace lohan {
extern const Kernels kernels_plain = kernels_of<Plain>();
}  // namespace lohan
