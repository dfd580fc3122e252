/*
 * A Vulkan driver that stands between Chromium's WebGPU (Dawn) and Mesa's lavapipe.
 *
 * Test rig only. Lavapipe is the software Vulkan driver of Mesa: as fast as a CPU allows, with 16-bit floats and
 * subgroups. Dawn refuses the one in Debian 12, and Chromium accepts a CPU device only when it is SwiftShader. This
 * library is put where Chromium looks for SwiftShader, loads lavapipe, hands every call through to it, and changes
 * three answers:
 *
 *   features    claims shaderSampledImageArrayDynamicIndexing and shaderStorageImageArrayDynamicIndexing, which Dawn
 *               demands of every device. Both concern arrays of images; compute shaders over buffers, all that is
 *               tested here, never touch them.
 *   device      takes those two claims back out of what Dawn asks of the new device, since lavapipe would refuse it.
 *   properties  gives SwiftShader's vendor and device ids, so that Chromium lets the adapter through.
 *
 * Two loaders reach a driver in two ways: the Vulkan loader calls the vk_icd* entry points below; Dawn opens the
 * library itself and asks only for vkGetInstanceProcAddr. Both end in resolve().
 *
 * LAVAPIPE_LIBRARY is the path of Mesa's driver, given by the build (build.mjs).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

#ifndef LAVAPIPE_LIBRARY
#error "LAVAPIPE_LIBRARY must name Mesa's lavapipe driver"
#endif

#define EXPORTED __attribute__((visibility("default")))

#define SWIFTSHADER_VENDOR_ID 0x1AE0u
#define SWIFTSHADER_DEVICE_ID 0xC0DEu

typedef PFN_vkVoidFunction Entry;
typedef Entry (*GetProcAddr)(VkInstance, const char *);
typedef VkResult (*Negotiate)(uint32_t *);

/* The driver below, opened once. */
static struct {
    GetProcAddr instance_proc;
    GetProcAddr physical_device_proc; /* may be null: an optional entry point */
    Negotiate negotiate;              /* may be null: an optional entry point */
} lavapipe;

static pthread_once_t lavapipe_opened = PTHREAD_ONCE_INIT;

static void open_lavapipe(void) {
    void *library = dlopen(LAVAPIPE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "lavapipe shim: cannot open %s: %s\n", LAVAPIPE_LIBRARY, dlerror());
        abort();
    }
    lavapipe.instance_proc = (GetProcAddr)dlsym(library, "vk_icdGetInstanceProcAddr");
    lavapipe.physical_device_proc = (GetProcAddr)dlsym(library, "vk_icdGetPhysicalDeviceProcAddr");
    lavapipe.negotiate = (Negotiate)dlsym(library, "vk_icdNegotiateLoaderICDInterfaceVersion");
    if (!lavapipe.instance_proc) {
        fprintf(stderr, "lavapipe shim: %s is no Vulkan driver\n", LAVAPIPE_LIBRARY);
        abort();
    }
}

/* Lavapipe's own versions of the functions that are replaced, filled in by resolve(). */
static Entry real_features, real_features2, real_properties, real_properties2, real_create_device;

/* ---- features: what is claimed ---------------------------------------------------------------------------------- */

static void claim_image_indexing(VkPhysicalDeviceFeatures *features) {
    features->shaderSampledImageArrayDynamicIndexing = VK_TRUE;
    features->shaderStorageImageArrayDynamicIndexing = VK_TRUE;
}

static VKAPI_ATTR void VKAPI_CALL get_features(VkPhysicalDevice device, VkPhysicalDeviceFeatures *features) {
    ((PFN_vkGetPhysicalDeviceFeatures)real_features)(device, features);
    claim_image_indexing(features);
}

static VKAPI_ATTR void VKAPI_CALL get_features2(VkPhysicalDevice device, VkPhysicalDeviceFeatures2 *features) {
    ((PFN_vkGetPhysicalDeviceFeatures2)real_features2)(device, features);
    claim_image_indexing(&features->features);
}

/* ---- properties: who answers ------------------------------------------------------------------------------------ */

static void take_swiftshader_ids(VkPhysicalDeviceProperties *properties) {
    properties->vendorID = SWIFTSHADER_VENDOR_ID;
    properties->deviceID = SWIFTSHADER_DEVICE_ID;
}

static VKAPI_ATTR void VKAPI_CALL get_properties(VkPhysicalDevice device, VkPhysicalDeviceProperties *properties) {
    ((PFN_vkGetPhysicalDeviceProperties)real_properties)(device, properties);
    take_swiftshader_ids(properties);
}

static VKAPI_ATTR void VKAPI_CALL get_properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 *properties) {
    ((PFN_vkGetPhysicalDeviceProperties2)real_properties2)(device, properties);
    take_swiftshader_ids(&properties->properties);
}

/* ---- device: the claims are taken back -------------------------------------------------------------------------- */

static void withdraw_image_indexing(const VkPhysicalDeviceFeatures *have, VkPhysicalDeviceFeatures *wanted) {
    wanted->shaderSampledImageArrayDynamicIndexing &= have->shaderSampledImageArrayDynamicIndexing;
    wanted->shaderStorageImageArrayDynamicIndexing &= have->shaderStorageImageArrayDynamicIndexing;
}

static VKAPI_ATTR VkResult VKAPI_CALL create_device(VkPhysicalDevice physical_device, const VkDeviceCreateInfo *info,
                                                    const VkAllocationCallbacks *allocator, VkDevice *device) {
    VkPhysicalDeviceFeatures have, wanted;
    VkDeviceCreateInfo ours = *info;
    ((PFN_vkGetPhysicalDeviceFeatures)real_features)(physical_device, &have);
    if (info->pEnabledFeatures) {
        wanted = *info->pEnabledFeatures;
        withdraw_image_indexing(&have, &wanted);
        ours.pEnabledFeatures = &wanted;
    }
    /* The features may come as a link of the pNext chain instead. It is the caller's memory, changed in place: the
     * caller (Dawn) builds it for this one call. */
    for (VkBaseOutStructure *link = (VkBaseOutStructure *)info->pNext; link; link = link->pNext) {
        if (link->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2) {
            withdraw_image_indexing(&have, &((VkPhysicalDeviceFeatures2 *)link)->features);
        }
    }
    return ((PFN_vkCreateDevice)real_create_device)(physical_device, &ours, allocator, device);
}

/* ---- looking functions up --------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    Entry ours;
    Entry *real;
} replaced[] = {
    {"vkGetPhysicalDeviceFeatures", (Entry)get_features, &real_features},
    {"vkGetPhysicalDeviceFeatures2", (Entry)get_features2, &real_features2},
    {"vkGetPhysicalDeviceFeatures2KHR", (Entry)get_features2, &real_features2},
    {"vkGetPhysicalDeviceProperties", (Entry)get_properties, &real_properties},
    {"vkGetPhysicalDeviceProperties2", (Entry)get_properties2, &real_properties2},
    {"vkGetPhysicalDeviceProperties2KHR", (Entry)get_properties2, &real_properties2},
    {"vkCreateDevice", (Entry)create_device, &real_create_device},
};

/* What the caller gets for `name`, given what lavapipe has under it. A function that lavapipe lacks stays missing. */
static Entry substitute(const char *name, Entry real) {
    if (!real) return NULL;
    for (size_t i = 0; i < sizeof replaced / sizeof replaced[0]; i++) {
        if (strcmp(name, replaced[i].name) == 0) {
            *replaced[i].real = real;
            return replaced[i].ours;
        }
    }
    return real;
}

static Entry resolve(VkInstance instance, const char *name) {
    pthread_once(&lavapipe_opened, open_lavapipe);
    /* create_device needs the plain feature query, whether or not the caller ever asks for it. */
    if (instance && !real_features) {
        real_features = lavapipe.instance_proc(instance, "vkGetPhysicalDeviceFeatures");
    }
    return substitute(name, lavapipe.instance_proc(instance, name));
}

EXPORTED VKAPI_ATTR Entry VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char *name) {
    if (strcmp(name, "vkGetInstanceProcAddr") == 0) return (Entry)vkGetInstanceProcAddr;
    return resolve(instance, name);
}

EXPORTED VKAPI_ATTR Entry VKAPI_CALL vk_icdGetInstanceProcAddr(VkInstance instance, const char *name) {
    return resolve(instance, name);
}

EXPORTED VKAPI_ATTR Entry VKAPI_CALL vk_icdGetPhysicalDeviceProcAddr(VkInstance instance, const char *name) {
    pthread_once(&lavapipe_opened, open_lavapipe);
    return lavapipe.physical_device_proc ? substitute(name, lavapipe.physical_device_proc(instance, name)) : NULL;
}

EXPORTED VKAPI_ATTR VkResult VKAPI_CALL vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    pthread_once(&lavapipe_opened, open_lavapipe);
    return lavapipe.negotiate ? lavapipe.negotiate(version) : VK_SUCCESS;
}
