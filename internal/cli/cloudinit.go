package cli

import (
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// cloudInitFlags are the flags of create and run that only disk images support.
type cloudInitFlags struct {
	sshKeys                                 []string
	userData, metaData, vendorData, network string
	datasource                              string
	user, password                          string
}

func (f *cloudInitFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringArrayVar(&f.sshKeys, "ssh-key", nil, "public key, or file of them, that may log in; for disk images; may be repeated")
	fs.StringVar(&f.user, "user", "", "user that may log in and become root, for disk images (default: the image's own)")
	fs.StringVar(&f.password, "password", "", "its password, for disk images; without --user that of root (default: none)")
	fs.StringVar(&f.userData, "user-data", "", "file with cloud-init user data, for disk images")
	fs.StringVar(&f.metaData, "meta-data", "", "file with a YAML map whose keys replace those of the generated meta data")
	fs.StringVar(&f.vendorData, "vendor-data", "", "file with cloud-init vendor data")
	fs.StringVar(&f.network, "network-config", "", "file with cloud-init network configuration, or dhcp to give none")
	fs.StringVar(&f.datasource, "datasource", "", "nocloud or configdrive: how a disk image gets these (default nocloud)")
	textui.CompleteWords(cmd, "datasource", cloudinit.DatasourceNoCloud, cloudinit.DatasourceConfigDrive)
}

// value returns what the flags say; nil if none is given.
func (f *cloudInitFlags) value() (*vm.CloudInit, error) {
	c := vm.CloudInit{Datasource: strings.ToLower(f.datasource), User: f.user}
	given := f.datasource != "" || f.login()
	if f.password != "" { // nobody past this command sees it
		hash, err := cloudinit.HashPassword(f.password)
		if err != nil {
			return nil, errdefs.Invalidf("--password: %w", err)
		}
		c.PasswordHash = hash
	}
	for _, doc := range []struct {
		flag, file string
		to         *string
	}{
		{"user-data", f.userData, &c.UserData},
		{"meta-data", f.metaData, &c.MetaData},
		{"vendor-data", f.vendorData, &c.VendorData},
		{"network-config", f.network, &c.NetworkConfig},
	} {
		if doc.file == "" {
			continue
		}
		given = true
		if doc.to == &c.NetworkConfig && doc.file == cloudinit.NetworkDHCP {
			c.NetworkConfig = cloudinit.NetworkDHCP
			continue
		}
		text, err := readDocument(doc.flag, doc.file)
		if err != nil {
			return nil, err
		}
		*doc.to = text
	}
	for _, k := range f.sshKeys {
		given = true
		if !strings.ContainsAny(k, " \t\n") { // a key has at least two words
			text, err := readDocument("ssh-key", k)
			if err != nil {
				return nil, err
			}
			k = text
		}
		c.SSHKeys = append(c.SSHKeys, k)
	}
	if !given {
		return nil, nil
	}
	if err := cloudinit.Validate(c); err != nil {
		return nil, err
	}
	return &c, nil
}

// login reports whether somebody is to log in whom the image does not know.
func (f *cloudInitFlags) login() bool { return f.user != "" || f.password != "" }

// noteLogin says that a container image's guest has no cloud-init. Programs of others pass the flags for any image.
func (a *app) noteLogin(f *cloudInitFlags, r vm.Record) {
	if r.ImageType != vm.ImageOCI || !f.login() {
		return
	}
	flag := "--user"
	if f.user == "" {
		flag = "--password"
	}
	a.warn("%s has no effect: %s is a container image, whose guest has no cloud-init and no passwords; --run-as sets the user of its main process", flag, textui.Cell(r.Spec.Image))
}

func readDocument(flag, name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", errdefs.Invalidf("--%s: %w", flag, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, cloudinit.MaxDocument+1))
	switch {
	case err != nil:
		return "", errdefs.Invalidf("--%s: %w", flag, err)
	case len(data) > cloudinit.MaxDocument:
		return "", errdefs.Invalidf("--%s: %s is larger than the %d bytes that are possible", flag, name, cloudinit.MaxDocument)
	case len(strings.TrimSpace(string(data))) == 0:
		return "", errdefs.Invalidf("--%s: %s is empty", flag, name)
	}
	return string(data), nil
}
