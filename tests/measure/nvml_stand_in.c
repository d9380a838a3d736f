/* A stand-in for libnvidia-ml.so.1 with at most one GPU, for hosts without a driver.
 *
 * It answers the calls of nvidia-ml-py that tuner makes, with NVML's own signatures (nvml.h, API 12).
 * What it answers is read from the environment:
 *   NVML_STAND_IN_INIT       return code of nvmlInitWithFlags: 0, 9 (driver not loaded), 18 (mismatch) ...
 *   NVML_STAND_IN_MEMORY     return code of nvmlDeviceGetMemoryInfo: 0, 4 (no permission), 15 (lost) ...
 *   NVML_STAND_IN_NAME       name of the GPU; none: there is no GPU
 *   NVML_STAND_IN_CAPABILITY 86 for 8.6
 *   NVML_STAND_IN_TOTAL, NVML_STAND_IN_USED    bytes
 *   NVML_STAND_IN_PROCESSES  "PID:BYTES PID:? ...", where ? is "not available"
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;

static const char *UUID = "GPU-5741d1c0-0000-0000-0000-000000000001";

static long long number(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

static int text(const char *from, char *to, unsigned length) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("NVML_STAND_IN_INIT"); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in"; }
int nvmlSystemGetDriverVersion(char *to, unsigned length) { return text("570.195.03", to, length); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = getenv("NVML_STAND_IN_NAME") ? 1 : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)UUID;
    return index == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)UUID;
    return strcmp(uuid, UUID) == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *to, unsigned length) { return text(device, to, length); }

int nvmlDeviceGetName(void *device, char *to, unsigned length) {
    (void)device;
    return text(getenv("NVML_STAND_IN_NAME"), to, length);
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = (int)number("NVML_STAND_IN_CAPABILITY") / 10;
    *minor = (int)number("NVML_STAND_IN_CAPABILITY") % 10;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    (void)device;
    memory->total = number("NVML_STAND_IN_TOTAL");
    memory->used = number("NVML_STAND_IN_USED");
    memory->free = memory->total - memory->used;
    return (int)number("NVML_STAND_IN_MEMORY");
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes) {
    (void)device;
    const char *from = getenv("NVML_STAND_IN_PROCESSES");
    unsigned found = 0, room = *count;
    int used;
    char pid[32], bytes[32];
    for (; from && sscanf(from, " %31[0-9]:%31[0-9?]%n", pid, bytes, &used) == 2; from += used, found++)
        if (processes && found < room) {
            processes[found].pid = (unsigned)atoll(pid);
            processes[found].used = *bytes == '?' ? ~0ULL : strtoull(bytes, NULL, 10);
            processes[found].gpu_instance = processes[found].compute_instance = ~0U;
        }
    *count = found;
    return found > room || (found && !processes) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process_t *processes) {
    (void)device;
    (void)processes;
    *count = 0;
    return SUCCESS;
}
