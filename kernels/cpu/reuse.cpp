#include "mpipipe/reuse.h"

#if defined(__linux__) && defined(__GLIBC__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))
#include <dlfcn.h>
#include <elf.h>
#include <gnu/libc-version.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace mpipipe::cpu {
namespace {

constexpr size_t line = 64;            // bytes, what torch asks to be aligned to
constexpr size_t header = sizeof(size_t);  // of a block of glibc, before its bytes

#if defined(__x86_64__)
constexpr bool is_address_of_function(uint64_t kind) { return kind == R_X86_64_JUMP_SLOT || kind == R_X86_64_GLOB_DAT; }
#else
constexpr bool is_address_of_function(uint64_t kind) { return kind == R_AARCH64_JUMP_SLOT || kind == R_AARCH64_GLOB_DAT; }
#endif

size_t largest_block = 0;  // above it glibc maps each block by itself, and nothing is cut

int aligned(void** out, size_t alignment, size_t n) {
    if (alignment > line || n >= largest_block) return posix_memalign(out, alignment, n);
    const size_t whole = (n + header + line - 1) / line * line - header;  // blocks follow each other in whole lines
    void* p = std::malloc(whole);
    if (p != nullptr && reinterpret_cast<uintptr_t>(p) % alignment != 0) {
        std::free(p);
        return posix_memalign(out, alignment, whole);
    }
    if (p == nullptr) return 12;  // ENOMEM; errno stays, as POSIX says
    *out = p;
    return 0;
}

// Both are glibc's own: with another allocator preloaded nothing is to be mended.
bool glibc_allocates() {
    for (const char* name : {"posix_memalign", "malloc"}) {
        Dl_info info;
        void* found = dlsym(RTLD_DEFAULT, name);
        if (found == nullptr || !dladdr(found, &info) || std::strstr(info.dli_fname, "libc.so") == nullptr) return false;
    }
    return true;
}

bool cuts_the_ends_off() {
    int major = 0, minor = 0;
    return std::sscanf(gnu_get_libc_version(), "%d.%d", &major, &minor) == 2 && (major < 2 || (major == 2 && minor < 38));
}

struct Search {
    const char* const* prefixes;
    size_t n_prefixes;
    size_t redirected;
};

bool wanted(const char* path, const Search& search) {
    const char* slash = std::strrchr(path, '/');
    const char* file = slash ? slash + 1 : path;
    for (size_t i = 0; i < search.n_prefixes; ++i)
        if (std::strncmp(file, search.prefixes[i], std::strlen(search.prefixes[i])) == 0) return true;
    return false;
}

// The parts of a loaded library that say where it keeps the addresses of functions of others (ELF, gABI 4.1).
struct Dynamic {
    const ElfW(Sym) * symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela) * tables[2] = {};
    size_t bytes[2] = {};
};

Dynamic dynamic_of(const dl_phdr_info& library) {
    Dynamic found;
    const auto at = [&](ElfW(Addr) p) { return p < library.dlpi_addr ? p + library.dlpi_addr : p; };
    for (int i = 0; i < library.dlpi_phnum; ++i) {
        if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; ++entry) {
            switch (entry->d_tag) {
                case DT_SYMTAB: found.symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr)); break;
                case DT_STRTAB: found.names = reinterpret_cast<const char*>(at(entry->d_un.d_ptr)); break;
                case DT_JMPREL: found.tables[0] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
                case DT_PLTRELSZ: found.bytes[0] = entry->d_un.d_val; break;
                case DT_RELA: found.tables[1] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
                case DT_RELASZ: found.bytes[1] = entry->d_un.d_val; break;
                default: break;
            }
        }
    }
    return found;
}

// The loader protects whole pages of a library's RELRO part: its last, begun page stays writable.
bool read_only_after_loading(const dl_phdr_info& library, uintptr_t slot, uintptr_t page_bytes) {
    for (int i = 0; i < library.dlpi_phnum; ++i) {
        const auto& part = library.dlpi_phdr[i];
        const uintptr_t begin = library.dlpi_addr + part.p_vaddr, end = (begin + part.p_memsz) & ~(page_bytes - 1);
        if (part.p_type == PT_GNU_RELRO && slot >= (begin & ~(page_bytes - 1)) && slot < end) return true;
    }
    return false;
}

bool write(const dl_phdr_info& library, uintptr_t slot) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t page = slot & ~(page_bytes - 1);  // a slot is aligned, so it lies in one page
    const bool guarded = read_only_after_loading(library, slot, page_bytes);
    if (guarded && mprotect(reinterpret_cast<void*>(page), page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(reinterpret_cast<void**>(slot), reinterpret_cast<void*>(&aligned), __ATOMIC_RELEASE);
    if (guarded) mprotect(reinterpret_cast<void*>(page), page_bytes, PROT_READ);
    return true;
}

int visit(dl_phdr_info* library, size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    if (library->dlpi_name == nullptr || !wanted(library->dlpi_name, search)) return 0;
    const Dynamic dynamic = dynamic_of(*library);
    if (dynamic.symbols == nullptr || dynamic.names == nullptr) return 0;
    for (int t = 0; t < 2; ++t) {
        const ElfW(Rela)* end = dynamic.tables[t] + dynamic.bytes[t] / sizeof(ElfW(Rela));
        for (const ElfW(Rela)* r = dynamic.tables[t]; r != end; ++r) {
            if (!is_address_of_function(ELF64_R_TYPE(r->r_info))) continue;
            const char* name = dynamic.names + dynamic.symbols[ELF64_R_SYM(r->r_info)].st_name;
            if (std::strcmp(name, "posix_memalign") == 0) search.redirected += write(*library, library->dlpi_addr + r->r_offset);
        }
    }
    return 0;
}

}  // namespace

size_t reuse_freed_blocks(const char* const* prefixes, size_t n, size_t largest) {
    if (!cuts_the_ends_off() || !glibc_allocates()) return 0;
    largest_block = largest;
    Search search{prefixes, n, 0};
    dl_iterate_phdr(visit, &search);
    return search.redirected;
}

}  // namespace mpipipe::cpu
#else
namespace mpipipe::cpu {
size_t reuse_freed_blocks(const char* const*, size_t, size_t) { return 0; }
}  // namespace mpipipe::cpu
#endif
