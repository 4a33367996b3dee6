package cloudinit

import (
	"cmp"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const root = "root" // the user that a password is for if none is named

var (
	userName     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,31}$`)
	passwordHash = regexp.MustCompile(`^\$6\$[./A-Za-z0-9]{1,16}\$[./A-Za-z0-9]{86}$`) // as HashPassword makes it
)

// withLogin returns c with the user that may log in added. It goes into the user-data if that is a cloud-config, otherwise into
// the vendor-data. Beside it the image keeps its default user, unless the document lists its users itself.
func withLogin(c vm.CloudInit, keys []string) (vm.CloudInit, error) {
	if c.User == "" && c.PasswordHash == "" {
		return c, nil
	}
	name := cmp.Or(c.User, root)
	switch {
	case !userName.MatchString(name):
		return c, errdefs.Invalidf("cloud-init: %q is not the name of a user: at most 32 of A-Z a-z 0-9 . _ -, the first a letter or _", name)
	case c.PasswordHash != "" && !passwordHash.MatchString(c.PasswordHash):
		return c, errdefs.Invalidf("cloud-init: the password of user %s is not hashed with SHA-512 crypt", name)
	}
	var err error
	switch {
	case isConfig(c.UserData):
		c.UserData, err = addLogin("user-data", c.UserData, name, c.PasswordHash, keys)
	case isConfig(c.VendorData):
		c.VendorData, err = addLogin("vendor-data", c.VendorData, name, c.PasswordHash, keys)
	default:
		err = errdefs.Invalidf("cloud-init: a user needs a #cloud-config as user-data or vendor-data, and both are something else")
	}
	return c, err
}

// addLogin merges the settings of the user with doc. Values in doc take precedence. Lists are joined.
func addLogin(what, doc, name, hash string, keys []string) (string, error) {
	given, err := parse(what, doc)
	if err != nil {
		return "", err
	}
	users, lists := valueAt(given, "users"), valueAt(given, "chpasswd", "list")
	if users != nil && users.Kind != yaml.SequenceNode {
		return "", errdefs.Invalidf("cloud-init: the users of %s are not a list, so no other can be added; make it a list", what)
	}
	if lists != nil && lists.Kind == yaml.ScalarNode { // the other form that cloud-init reads: one string with a line for each user
		*lists = *listOf(strings.FieldsFunc(lists.Value, func(r rune) bool { return r == '\n' || r == '\r' })...)
	}
	ours := &yaml.Node{Kind: yaml.MappingNode}
	add := func(key string, value *yaml.Node) { ours.Content = append(ours.Content, word(key), value) }
	if name == root {
		add("disable_root", word("false"))
	} else {
		entry := mapping("name", name, "sudo", "ALL=(ALL) NOPASSWD:ALL", "shell", "/bin/bash")
		if hash != "" {
			entry.Content = append(entry.Content, word("lock_passwd"), word("false"), word("hashed_passwd"), quoted(hash))
		}
		if len(keys) > 0 {
			entry.Content = append(entry.Content, word("ssh_authorized_keys"), listOf(keys...))
		}
		list := &yaml.Node{Kind: yaml.SequenceNode}
		if users == nil {
			list.Content = append(list.Content, word("default"))
		}
		list.Content = append(list.Content, entry)
		add("users", list)
	}
	if hash != "" { // chpasswd also sets it for root, and for the image's default user, whom cloud-init locks before
		add("chpasswd", &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{
			word("expire"), word("false"), word("list"), listOf(name + ":" + hash),
		}})
		add("ssh_pwauth", word("true"))
	}
	return emit(merge(ours, given))
}

// valueAt returns the value at a path of keys, nil if there is none.
func valueAt(n *yaml.Node, path ...string) *yaml.Node {
	for _, key := range path {
		if n.Kind != yaml.MappingNode {
			return nil
		}
		i, ok := keysOf(n)[key]
		if !ok || isNull(n.Content[i+1]) {
			return nil
		}
		n = n.Content[i+1]
	}
	return n
}

func listOf(words ...string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode}
	for _, w := range words {
		n.Content = append(n.Content, quoted(w))
	}
	return n
}

// Keys returns the lines of text, which is an authorized_keys file, that are not empty.
func Keys(text string) (keys []string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			keys = append(keys, line)
		}
	}
	return keys
}
