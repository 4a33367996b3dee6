package workload

import (
	"google.golang.org/protobuf/reflect/protoreflect"
)

// unknown reports whether m, or a message in it, has a field that this version does not know. Whoever sent it expects that it holds.
func unknown(m protoreflect.Message) (found bool) {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, x protoreflect.Value) bool {
					found = unknown(x.Message())
					return !found
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				found = found || unknown(v.List().Get(i).Message())
			}
		default:
			found = unknown(v.Message())
		}
		return !found
	})
	return found
}
