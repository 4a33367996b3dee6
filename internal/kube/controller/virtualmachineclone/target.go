package virtualmachineclone

import (
	"encoding/json"
	"fmt"
	"net"
	"regexp"
	"strings"

	"kubevirt.io/api/clone/v1beta1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// operation is one of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// patches returns what the clone of a machine with the metadata and the spec has otherwise, as JSON patches for a restore. Its firmware and its
// network interfaces are its own. Errors: Invalid.
func patches(c *v1beta1.VirtualMachineClone, labels, annotations map[string]string, spec *v1.VirtualMachineSpec) (all []string, err error) {
	s := &c.Spec
	t := spec.Template
	var ops []operation
	for _, f := range []struct {
		at      string
		has     map[string]string
		filters []string
	}{
		{"/metadata/labels", labels, s.LabelFilters},
		{"/metadata/annotations", annotations, s.AnnotationFilters},
		{"/spec/template/metadata/labels", t.ObjectMeta.Labels, s.Template.LabelFilters},
		{"/spec/template/metadata/annotations", t.ObjectMeta.Annotations, s.Template.AnnotationFilters},
	} {
		kept, err := filtered(f.has, f.filters)
		if err != nil {
			return nil, err
		}
		if len(kept) < len(f.has) {
			ops = append(ops, operation{"add", f.at, kept})
		}
	}
	const domain = "/spec/template/spec/domain/"
	unused := map[string]string{}
	for name, mac := range s.NewMacAddresses {
		if _, err := net.ParseMAC(mac); err != nil {
			return nil, errdefs.Invalidf("spec.newMacAddresses[%s]: %q is no MAC address", name, mac)
		}
		unused[name] = mac
	}
	for i, n := range t.Spec.Domain.Devices.Interfaces {
		at := fmt.Sprintf("%sdevices/interfaces/%d/macAddress", domain, i)
		if mac := unused[n.Name]; mac != "" {
			ops = append(ops, operation{"add", at, mac})
			delete(unused, n.Name)
		} else if n.MacAddress != "" {
			ops = append(ops, operation{Op: "remove", Path: at})
		}
	}
	for name := range unused {
		return nil, errdefs.Invalidf("spec.newMacAddresses[%s]: the machine has no interface of this name", name)
	}
	firmware := v1.Firmware{}
	if has := t.Spec.Domain.Firmware; has != nil {
		firmware = *has
	}
	is := firmware
	is.UUID, is.Serial = "", ""
	if s.NewSMBiosSerial != nil {
		is.Serial = *s.NewSMBiosSerial
	}
	if is.UUID != firmware.UUID || is.Serial != firmware.Serial {
		ops = append(ops, operation{"add", domain + "firmware", is})
	}
	for _, o := range ops {
		text, err := json.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("encode the patch of %s: %w", o.Path, err)
		}
		all = append(all, string(text))
	}
	return append(all, s.Patches...), nil
}

// filtered returns what of a map a clone gets: with filters, the keys that one of them matches and none with a ! does. A filter is a regular expression.
func filtered(m map[string]string, filters []string) (map[string]string, error) {
	if len(filters) == 0 {
		return m, nil
	}
	var with, without []*regexp.Regexp
	for _, f := range filters {
		text, negated := strings.CutPrefix(f, "!")
		if text == "*" {
			text = ".*"
		}
		re, err := regexp.Compile(text)
		if err != nil {
			return nil, errdefs.Invalidf("the filter %q is no regular expression: %w", f, err)
		}
		if negated {
			without = append(without, re)
		} else {
			with = append(with, re)
		}
	}
	matches := func(all []*regexp.Regexp, key string) bool {
		for _, re := range all {
			if re.MatchString(key) {
				return true
			}
		}
		return false
	}
	kept := map[string]string{}
	for k, v := range m {
		if matches(with, k) && !matches(without, k) {
			kept[k] = v
		}
	}
	return kept, nil
}
