// Which memory an address is of.
#pragma once

#include <cstddef>

namespace emu {

bool on_device(const void *address, size_t size);  // allocated there, all of it
bool touches_device(const void *address);          // among the device's addresses, allocated or not
bool is_pinned(const void *address, size_t size);

}  // namespace emu
