package cloudinit

import (
	"path"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Mount is a shared folder that cloud-init mounts by virtiofs when the guest boots for the first time, and enters in the guest's
// /etc/fstab for later boots.
type Mount struct {
	Tag      string // by which the guest finds the folder
	Path     string // absolute, in the guest
	ReadOnly bool
}

// MountsOf returns where s mounts folders of the node.
func MountsOf(s vm.Spec) []Mount {
	var out []Mount
	for i, v := range s.Dirs() {
		for _, m := range s.Mounts {
			if m.Volume == v.Name {
				out = append(out, Mount{Tag: vm.DirTag(i), Path: m.Path, ReadOnly: m.ReadOnly || v.Dir.ReadOnly})
			}
		}
	}
	return out
}

// check returns an InvalidArgument error if the guest cannot be told to mount it there.
func (m Mount) check() error {
	if !path.IsAbs(m.Path) || path.Clean(m.Path) != m.Path || m.Path == "/" {
		return errdefs.Invalidf("cloud-init: the path of mount %q must be absolute, without . and ..", m.Path)
	}
	if strings.ContainsFunc(m.Path, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) || r == '\\' || r == '#' }) {
		return errdefs.Invalidf("cloud-init: the path of mount %q has spaces or other characters that /etc/fstab of a guest cannot have; choose another path", m.Path)
	}
	return nil
}

// withMounts returns c with mounts added to the user-data, or to the vendor-data if the user-data is no cloud-config. A guest boots even if it
// cannot mount one of them.
func withMounts(c vm.CloudInit, mounts []Mount) (vm.CloudInit, error) {
	if len(mounts) == 0 {
		return c, nil
	}
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, m := range mounts {
		if err := m.check(); err != nil {
			return c, err
		}
		options := "rw,nofail"
		if m.ReadOnly {
			options = "ro,nofail"
		}
		entry := &yaml.Node{Kind: yaml.SequenceNode}
		for _, field := range []string{m.Tag, m.Path, "virtiofs", options, "0", "0"} {
			entry.Content = append(entry.Content, quoted(field))
		}
		list.Content = append(list.Content, entry)
	}
	over := &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{word("mounts"), list}}
	return withConfig(c, "shared folders", func(name, doc string) (string, error) {
		base, err := parse(name, doc)
		if err != nil {
			return "", err
		}
		return emit(merge(base, over))
	})
}
