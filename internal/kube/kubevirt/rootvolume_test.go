package kubevirt

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// disksOf is an instance with volumes and disks, in words: "claim:NAME", "plug:NAME", "image:NAME" or "empty:NAME" for volumes and NAME or NAME@ORDER for disks.
func disksOf(volumes, disks string) *v1.VirtualMachineInstanceSpec {
	s := &v1.VirtualMachineInstanceSpec{}
	for _, word := range strings.Fields(volumes) {
		kind, name, _ := strings.Cut(word, ":")
		v := v1.Volume{Name: name}
		switch kind {
		case "claim", "plug":
			v.PersistentVolumeClaim = &v1.PersistentVolumeClaimVolumeSource{Hotpluggable: kind == "plug"}
			v.PersistentVolumeClaim.ClaimName = name
		case "image":
			v.ContainerDisk = &v1.ContainerDiskSource{Image: "a"}
		case "empty":
			v.EmptyDisk = &v1.EmptyDiskSource{}
		}
		s.Volumes = append(s.Volumes, v)
	}
	for _, word := range strings.Fields(disks) {
		name, order, ordered := strings.Cut(word, "@")
		d := v1.Disk{Name: name}
		if ordered {
			var n uint
			_, _ = fmt.Sscan(order, &n)
			d.BootOrder = &n
		}
		s.Domain.Devices.Disks = append(s.Domain.Devices.Disks, d)
	}
	return s
}

func TestRootVolume(t *testing.T) {
	for what, tt := range map[string]struct{ volumes, disks, want, refused string }{
		"nothing":                     {"", "", "", ""},
		"no disk to boot from":        {"empty:e", "e", "", ""},
		"a containerDisk":             {"empty:e image:i", "e i", "i", ""},
		"a containerDisk before all":  {"claim:a image:i", "a i", "i", ""},
		"a claim":                     {"empty:e claim:a", "e a", "a", ""},
		"a claim that no disk names":  {"claim:a", "", "a", ""},
		"the first disk of claims":    {"claim:a claim:b", "b a", "b", ""},
		"the lowest order":            {"claim:a claim:b", "a@2 b@1", "b", "a"},
		"an order before none":        {"claim:a claim:b", "a b@7", "b", ""},
		"a disk before what is none":  {"claim:a claim:b", "b", "b", ""},
		"a claim that was added":      {"plug:p claim:a", "p a", "a", ""},
		"only what was added":         {"plug:p", "p", "", ""},
		"an order of another":         {"claim:a image:i", "a@1 i", "i", "a"},
		"an order of what cannot be":  {"claim:a empty:e", "e@1 a", "a", "e"},
		"an order of what boots":      {"claim:a empty:e", "e a@1", "a", ""},
		"an order of the image":       {"claim:a image:i", "i@1 a", "i", ""},
		"an order, and one after all": {"claim:a claim:b claim:c", "a@3 b c@2", "c", "a"},
	} {
		s := disksOf(tt.volumes, tt.disks)
		got := ""
		if v := rootVolume(s); v != nil {
			got = v.Name
		}
		if d := diff.Of(tt.want, got); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		c := check{spec: s, at: field.NewPath("spec")}
		c.disks()
		refused := ""
		for _, err := range c.errs {
			var i int
			_, _ = fmt.Sscanf(err.Field, "spec.domain.devices.disks[%d].bootOrder", &i)
			refused += s.Domain.Devices.Disks[i].Name
		}
		if d := diff.Of(tt.refused, refused); d != "" {
			t.Errorf("%s: refused %s", what, d)
		}
	}
}

func TestPodBootsFromClaim(t *testing.T) {
	vmi := &v1.VirtualMachineInstance{Spec: *disksOf("claim:a claim:b", "a b@1")}
	pod := Pod(vmi)
	c := pod.Spec.Containers[0]
	if c.Image != "volume://b" || len(c.VolumeDevices) != 2 || len(pod.Spec.Volumes) != 2 {
		t.Errorf("image %s, devices %+v, volumes %+v", c.Image, c.VolumeDevices, pod.Spec.Volumes)
	}
}
