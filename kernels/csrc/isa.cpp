// All kernels for one instruction set: compiled once per set, with PF_ISA as its name.

#include "attention.cpp"
#include "elementwise.cpp"
#include "linear.cpp"
#include "sampling.cpp"

namespace pagefleet {
namespace PF_ISA {

extern const KernelTable kernel_table = {
    packed_bytes,   pack_linear, pack_codes,   unpack_rows,  linear, attention,
    rope_and_cache, rms_norm,    add_rms_norm, silu_and_mul, gelu_tanh_and_mul,
    filter_logits,  sum,         kPanel,
};

}  // namespace PF_ISA
}  // namespace pagefleet
