// Classification of addresses.
#pragma once

#include <cstddef>

namespace emu {

bool on_device(const void *address, size_t size);  // true if all of it is allocated on the device
bool touches_device(const void *address);          // true for the device's addresses, allocated or not
bool is_pinned(const void *address, size_t size);

// Memory that the device's libraries use themselves. Returns 0, or the error of aclrtMalloc.
int take_memory(const char *name, void **address, size_t bytes);
void give_memory(void *address);

}  // namespace emu
