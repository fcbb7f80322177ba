// Asks Linux for the tile registers of AMX, which a process gets only if it asks. Knows nothing else.
#include <sys/syscall.h>
#include <unistd.h>

namespace {
// Of asm/prctl.h, and the number of the tiles' state.
constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
}  // namespace

// Whether this process and all its threads may use them.
extern "C" bool request_tiles() { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
