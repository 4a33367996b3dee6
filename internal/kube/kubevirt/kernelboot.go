package kubevirt

import (
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// kernelBoot returns what a guest boots instead of a disk; nil if it boots from a disk.
func kernelBoot(s *v1.VirtualMachineInstanceSpec) *v1.KernelBoot {
	if f := s.Domain.Firmware; f != nil && f.KernelBoot != nil && f.KernelBoot.Container != nil {
		return f.KernelBoot
	}
	return nil
}

// kernelVolume returns the name of the volume of the pod with the files of kernelBoot. No volume of the instance has it.
func kernelVolume(s *v1.VirtualMachineInstanceSpec) string {
	taken := map[string]bool{}
	for _, v := range s.Volumes {
		taken[v.Name] = true
	}
	name := "kernel-boot"
	for n := 1; taken[name]; n++ {
		name = "kernel-boot-" + strconv.Itoa(n)
	}
	return name
}

// kernel returns the kernel of the machine.
func kernel(s *v1.VirtualMachineInstanceSpec) *contract.Kernel {
	k := kernelBoot(s)
	if k == nil {
		return nil
	}
	return &contract.Kernel{Volume: kernelVolume(s), Path: k.Container.KernelPath, Initrd: k.Container.InitrdPath, Args: k.KernelArgs}
}

// addKernel gives pod the files of kernelBoot.
func addKernel(pod *corev1.Pod, s *v1.VirtualMachineInstanceSpec) {
	k := kernelBoot(s)
	if k == nil {
		return
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: kernelVolume(s), VolumeSource: corev1.VolumeSource{
		Image: &corev1.ImageVolumeSource{Reference: k.Container.Image, PullPolicy: k.Container.ImagePullPolicy},
	}})
	addPullSecret(pod, k.Container.ImagePullSecret)
}

// addPullSecret lets the node pull images of pod with the credentials of a secret.
func addPullSecret(pod *corev1.Pod, name string) {
	ref := corev1.LocalObjectReference{Name: name}
	for _, known := range pod.Spec.ImagePullSecrets {
		if known == ref {
			return
		}
	}
	if name != "" {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, ref)
	}
}

// kernelBoot refuses what no guest boots.
func (c *check) kernelBoot(firmware *field.Path) {
	at := firmware.Child("kernelBoot")
	boot := c.spec.Domain.Firmware.KernelBoot
	if boot == nil {
		return
	}
	if boot.Container == nil {
		if boot.KernelArgs != "" {
			c.invalid(at.Child("kernelArgs"), boot.KernelArgs, "are for the kernel of a container; give the container, or leave them out")
		}
		return
	}
	if err := vm.ValidateKernelArgs(boot.KernelArgs); err != nil {
		c.invalid(at.Child("kernelArgs"), boot.KernelArgs, err.Error())
	}
	if b := c.spec.Domain.Firmware.Bootloader; b != nil && b.EFI != nil && secure(b.EFI) {
		c.errs = append(c.errs, field.Forbidden(firmware.Child("bootloader", "efi", "secureBoot"), "Secure Boot, which is the default of efi, does not check the kernel of kernelBoot; set it to false"))
	}
	k, at := boot.Container, at.Child("container")
	if k.Image == "" {
		c.errs = append(c.errs, field.Required(at.Child("image"), "name the image with the kernel"))
	}
	only(c, at.Child("imagePullPolicy"), k.ImagePullPolicy, "", corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	if k.KernelPath == "" {
		c.errs = append(c.errs, field.Required(at.Child("kernelPath"), "name the kernel in the image; an initrd alone boots nothing"))
	} else if err := vm.ValidateKernelPath(k.KernelPath); err != nil {
		c.invalid(at.Child("kernelPath"), k.KernelPath, err.Error())
	}
	if k.InitrdPath != "" {
		if err := vm.ValidateKernelPath(k.InitrdPath); err != nil {
			c.invalid(at.Child("initrdPath"), k.InitrdPath, err.Error())
		}
	}
}

// kernelBootStatus returns the checksums of what the guest boots instead of a disk; nil if none is known.
func kernelBootStatus(pod *corev1.Pod) *v1.KernelBootStatus {
	kernel, initrd := contract.KernelSums(pod.Annotations)
	if kernel == 0 && initrd == 0 {
		return nil
	}
	out := &v1.KernelBootStatus{}
	if kernel != 0 {
		out.KernelInfo = &v1.KernelInfo{Checksum: kernel}
	}
	if initrd != 0 {
		out.InitrdInfo = &v1.InitrdInfo{Checksum: initrd}
	}
	return out
}
