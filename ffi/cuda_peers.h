// The memory through which the GPUs of one host add up small arrays (cuda/collectives). It is
// allocated before any program runs, and never freed: work may still be on its way at the end.
//
// Functions that return no error throw std::runtime_error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/collectives/peer_memory.h"

namespace nvfp4 {

// Allocates the memory of a GPU in a group of `count`, and returns its address. `device` is the
// number of the GPU in this process.
uintptr_t AllocatePeerMemory(int device, int count);

// Lets a GPU access the memory of another GPU of this process.
void EnablePeerAccess(int device, int peer);

// Return what another process needs to access the memory of a GPU of this one, and the address of
// such memory on a GPU of this process.
std::string ExportPeerMemory(int device, uintptr_t memory);
uintptr_t ImportPeerMemory(int device, const std::string& handle);

// Makes a GPU of this process the member `rank` of a group. `groups` names all groups of a program;
// a GPU belongs to one of them. `memory` has the addresses of the memory of all members.
void AddPeerGroup(const std::string& groups, int device, int rank,
                  const std::vector<uintptr_t>& memory, double timeout_seconds);

// Returns the group to which a GPU belongs, if AddPeerGroup has been called for it.
std::optional<PeerGroup> FindPeerGroup(std::string_view groups, int device);

// Returns why a kernel of this process has ended with an error; empty if none has.
std::string PeerFailureText();

}  // namespace nvfp4
