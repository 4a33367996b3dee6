package convert

import (
	"path"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// GuestBoot returns how the guest of a pod boots the disk image of its container, as the annotations of the pod say.
// Errors: InvalidArgument; no error quotes a document.
func GuestBoot(pod *cri.PodSandboxConfig) (vm.GuestBoot, error) {
	ask, err := contract.ParseVirtlet(pod.GetAnnotations())
	if err != nil {
		return vm.GuestBoot{}, errdefs.As(errdefs.InvalidArgument, err)
	}
	machine, err := contract.ParseMachine(pod.GetAnnotations())
	if err != nil {
		return vm.GuestBoot{}, errdefs.As(errdefs.InvalidArgument, err)
	}
	for _, source := range []struct {
		key string
		src contract.Source
		use string
	}{
		{contract.KeyVirtletUserDataSource, ask.UserDataSource, contract.KeyVirtletUserData},
		{contract.KeyVirtletSSHKeySource, ask.SSHKeySource, contract.KeyVirtletSSHKeys},
		{contract.KeyVirtletFiles, ask.Files, "a volume"},
		{contract.KeyNetworkData, machine.NetworkData, contract.KeyVirtletForceDHCP},
	} {
		if source.src != (contract.Source{}) {
			return vm.GuestBoot{}, errdefs.Invalidf("annotation %s names %s, and a kubelet gives its runtime only what volumes have; use %s instead", source.key, source.src, source.use)
		}
	}
	out := vm.GuestBoot{Firmware: vm.Firmware(machine.Firmware), Storage: ask.RootVolumeSize.Value()}
	if !ask.CloudInit() {
		return out, nil
	}
	c := vm.CloudInit{Datasource: ask.ImageType, MetaData: ask.MetaData, UserData: strings.ReplaceAll(ask.UserDataScript, contract.MountScript, "")}
	if c.UserData == "" && ask.UserData != "" {
		if c.UserData, err = cloudinit.Merge("", ask.UserData); err != nil {
			return out, err
		}
	}
	if ask.ForceDHCP {
		c.NetworkConfig = cloudinit.NetworkDHCP
	}
	c.SSHKeys = cloudinit.Keys(ask.SSHKeys)
	out.CloudInit = &c
	return out, cloudinit.Validate(c)
}

// namesFiles are the files with which a kubelet tells a container names and addresses. A guest that boots itself has its own.
var namesFiles = []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

// Booting returns c for an image that boots itself. What a kubelet gives each container, and what only a process of ours could have, has no effect there;
// what a pod asks for stays, so that it is refused if it is not possible.
func Booting(c vm.Container) vm.Container {
	c.Process = vm.Process{Entrypoint: c.Process.Entrypoint, Args: c.Process.Args, ReadOnlyRoot: c.Process.ReadOnlyRoot}
	c.MessagePath, c.PIDs = "", vm.PIDs{}
	names := func(volume string) bool {
		at := slices.IndexFunc(c.Mounts, func(m vm.Mount) bool { return m.Volume == volume })
		return at >= 0 && c.Mounts[at].SubPath == vm.DirFile && slices.Contains(namesFiles, path.Clean(c.Mounts[at].Path))
	}
	c.Volumes = slices.DeleteFunc(slices.Clone(c.Volumes), func(v vm.Volume) bool { return names(v.Name) })
	c.Mounts = slices.DeleteFunc(slices.Clone(c.Mounts), func(m vm.Mount) bool { return names(m.Volume) })
	return c
}
