package cloudinit

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"path"
	"strings"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// File is one file that cloud-init writes when the guest boots for the first time. Its owner is root.
type File struct {
	Path string // absolute, in the guest
	Data []byte
	Mode uint32 // permission bits; 0 is 0644
}

// WithFiles returns c with files added. They go into the user-data if that is a cloud-config. Any other user-data, such as
// a script, is left as it is; the files then go into the vendor-data, which cloud-init reads as well.
func WithFiles(c vm.CloudInit, files []File) (vm.CloudInit, error) {
	if len(files) == 0 {
		return c, nil
	}
	return withConfig(c, "files and environment variables", func(name, doc string) (string, error) { return addFiles(name, doc, files) })
}

// withConfig changes the user-data by add, or the vendor-data if the user-data is no cloud-config. what says what is added.
func withConfig(c vm.CloudInit, what string, add func(name, doc string) (string, error)) (vm.CloudInit, error) {
	var err error
	switch {
	case isConfig(c.UserData):
		c.UserData, err = add("user-data", c.UserData)
	case isConfig(c.VendorData):
		c.VendorData, err = add("vendor-data", c.VendorData)
	default:
		err = errdefs.Invalidf("cloud-init: %s need a #cloud-config as user-data or vendor-data, and both are something else", what)
	}
	return c, err
}

// AddFiles returns the cloud-config doc ("" is an empty one) with files appended to its write_files.
func AddFiles(doc string, files []File) (string, error) { return addFiles("the document", doc, files) }

func addFiles(name, doc string, files []File) (string, error) {
	base, err := parse(name, doc)
	if err != nil {
		return "", err
	}
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, f := range files {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || f.Path == "/" || strings.ContainsRune(f.Path, 0) {
			return "", errdefs.Invalidf("cloud-init: the path of file %q must be absolute, without . and ..", f.Path)
		}
		if f.Mode > 0o7777 {
			return "", errdefs.Invalidf("cloud-init: file %s has mode %o, which is more than permission bits", f.Path, f.Mode)
		}
		mode := cmp.Or(f.Mode, 0o644)
		list.Content = append(list.Content, mapping(
			"path", f.Path, "encoding", "b64", "permissions", fmt.Sprintf("%04o", mode),
			"content", base64.StdEncoding.EncodeToString(f.Data)))
	}
	over := &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{word("write_files"), list}}
	return emit(merge(base, over))
}

// mapping makes a map from pairs of keys, which are plain words, and string values.
func mapping(kv ...string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for i := 0; i < len(kv); i += 2 {
		n.Content = append(n.Content, word(kv[i]), quoted(kv[i+1]))
	}
	return n
}
