package convert

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestGuestBoot(t *testing.T) {
	got, err := GuestBoot(&cri.PodSandboxConfig{Annotations: map[string]string{
		contract.KeyFirmware: "uefi", contract.KeyVirtletRootVolumeSize: "4Gi", contract.KeyVirtletSSHKeys: "ssh-ed25519 AAAA a\n\nssh-ed25519 AAAAB b\n",
		contract.KeyVirtletUserData: "hostname: x", contract.KeyVirtletForceDHCP: "true",
	}})
	c := got.CloudInit
	if err != nil || got.Firmware != vm.FirmwareUEFI || got.Storage != 4<<30 || c == nil || len(c.SSHKeys) != 2 || !strings.HasPrefix(c.UserData, "#cloud-config\n") ||
		!strings.Contains(c.UserData, "hostname") || c.NetworkConfig != "dhcp" {
		t.Errorf("%+v, %+v, %v", got, c, err)
	}
	if got, err := GuestBoot(&cri.PodSandboxConfig{}); err != nil || got != (vm.GuestBoot{}) {
		t.Errorf("without annotations: %+v, %v", got, err)
	}
	for key, value := range map[string]string{
		contract.KeyVirtletUserDataSource: "secret/s", contract.KeyVirtletSSHKeySource: "configmap/c/k", contract.KeyVirtletFiles: "configmap/c", contract.KeyFirmware: "coreboot",
		contract.KeyVirtletRootVolumeSize: "much", contract.KeyVirtletUserData: "- secret",
	} {
		_, err := GuestBoot(&cri.PodSandboxConfig{Annotations: map[string]string{key: value}})
		if !errdefs.Is(err, errdefs.InvalidArgument) || strings.Contains(err.Error(), "- secret") {
			t.Errorf("%s %s: %v", key, value, err)
		}
	}
}

func TestBooting(t *testing.T) {
	file := func(name string) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/x", File: true, Trusted: true}}
	}
	c := Booting(vm.Container{
		Process:     vm.Process{Args: []string{"a"}, Env: []vm.EnvVar{{Name: "A"}}, Security: &vm.Security{}, User: "1", TTY: true},
		MessagePath: "/dev/termination-log",
		Volumes:     []vm.Volume{file("m0"), file("m1"), {Name: "m2", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/y", Trusted: true}}},
		Mounts: []vm.Mount{
			{Volume: "m0", Path: "/etc/hosts", SubPath: vm.DirFile}, {Volume: "m1", Path: "/etc/own", SubPath: vm.DirFile}, {Volume: "m2", Path: "/var/run/secrets"},
		},
	})
	if len(c.Volumes) != 2 || c.Volumes[0].Name != "m1" || len(c.Mounts) != 2 || c.Mounts[0].Path != "/etc/own" || c.MessagePath != "" || c.Process.Env != nil ||
		c.Process.Security != nil || len(c.Process.Args) != 1 {
		t.Errorf("%+v", c)
	}
}
